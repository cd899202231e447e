"""What connectors of SQL endpoints share.

Dialects and tables (`dialect`, `changes`), what fields are asked for (`constraints`),
fences and what was applied (`fence`, `applied`), documents put together from columns
(`documents`), and the connector that joins them (`connector`).
"""
