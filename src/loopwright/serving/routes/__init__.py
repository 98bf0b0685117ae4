"""The endpoints, a file a kind: each reads a body, asks the service, and shapes the answer."""
