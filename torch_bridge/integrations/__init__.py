"""Adapters to models that others wrote; each imports its host only when it is used."""
