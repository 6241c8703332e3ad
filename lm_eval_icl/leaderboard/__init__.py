"""Result files into records, statistics, a table, a page and figures."""
