"""The page: a lake and what runs on it, to be watched with a browser or a machine. Read-only.

    serve(LakeView("file:./lake", settings), "127.0.0.1:8080", token=None)

A `View` says what there is; the app serves it as a page, as JSON and as metrics.
"""

from penstock.web.app import app
from penstock.web.http_server import Served, serve
from penstock.web.lake_view import LakeView, View

__all__ = ["LakeView", "Served", "View", "app", "serve"]
