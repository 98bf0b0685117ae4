"""Where steps run: devices and the precision each prefers."""
