"""Python processes of tests, forked from servers that have done the slow imports."""
