"""Runs over several ranks: who is who, what they exchange, how they start together and end together."""
