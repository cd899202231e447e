"""What connectors of SQL endpoints share.

Dialects and tables (`dialect`, `table_changes`), what is asked of fields (`constraints`) and
what stands in their way (`conflicts`), fences and what was applied (`fence`,
`applied_spec`), documents put together from columns (`document_columns`), and the connector that
joins them (`connector`).
"""
