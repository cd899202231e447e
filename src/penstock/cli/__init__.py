"""The command line: one file for each verb, and `main.py` that names them."""
