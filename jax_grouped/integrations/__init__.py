"""Adapters to models that others wrote, one file per host. Importing one changes nothing; `register` does."""
