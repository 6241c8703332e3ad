"""A board of results as tables, a page and figures."""
