"""Locks for Django: one way to say "only one of us at a time", on storage the project already runs."""
