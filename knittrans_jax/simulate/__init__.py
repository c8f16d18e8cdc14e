"""The real admission controller in virtual time."""
