"""The loops: stateless state machines that families configure with their own ops."""
