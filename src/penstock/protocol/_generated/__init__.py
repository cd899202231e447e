"""Made from proto/ by `make protocol`; never edited, never imported past this room."""
