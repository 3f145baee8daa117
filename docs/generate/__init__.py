"""Generates the pages of the site that the code knows best, when MkDocs builds it (`make docs`)."""
