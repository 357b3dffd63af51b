"""Adapters to models that others wrote, one file per host. Importing a file changes nothing in its host."""
