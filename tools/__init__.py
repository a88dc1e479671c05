"""Programs for those who work on TLT: its documentation."""
