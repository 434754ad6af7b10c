"""Rows in consecutive groups, one matrix a group."""
