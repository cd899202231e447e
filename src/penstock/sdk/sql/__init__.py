"""Shared code for connectors of SQL endpoints.

dialect, table_changes   SQL of one endpoint; statements that create and alter tables
constraints, conflicts   constraints on fields, for new and existing tables
fence, applied_spec      the two tables of the connector
document_columns         documents assembled from columns
connector                Validate, Apply and delete
"""
