"""What connectors of SQL endpoints share.

Dialects and tables (`dialect`, `changes`), what is asked of fields (`constraints`) and
what stands in their way (`conflicts`), fences and what was applied (`fence`,
`applied`), documents put together from columns (`documents`), and the connector that
joins them (`connector`).
"""
