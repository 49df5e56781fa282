"""Native models, a file each; what their configurations say is readable without torch."""
