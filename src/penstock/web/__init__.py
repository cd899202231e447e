"""Read-only status page of a lake and its tasks, for browsers and monitoring systems.

    serve(LakeView("file:./lake", settings), "127.0.0.1:8080", token=None)

A `View` provides the state; the app serves it as a page, as JSON and as metrics.
"""

from penstock.web.app import app
from penstock.web.embedded import embedded_page
from penstock.web.http_server import Served, serve
from penstock.web.lake_view import LakeView, View

__all__ = ["LakeView", "Served", "View", "app", "embedded_page", "serve"]
