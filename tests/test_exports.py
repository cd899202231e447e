"""Names that packages export."""

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import penstock
from penstock.lazy_exports import lazy_exports

PACKAGES = sorted(
    module.name
    for module in pkgutil.iter_modules(penstock.__path__, "penstock.")
    if module.ispkg and module.name != "penstock.testing"
)


def test_packages_are_found():
    assert {"penstock.catalog", "penstock.persist", "penstock.sdk"} <= {*PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_exports_each_name_of_all(package):
    module = import_module(package)
    missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert missing == []


def test_name_that_package_does_not_export_is_rejected():
    load = lazy_exports("penstock", clock=("Clock",))
    assert load("Clock") is import_module("penstock.clock").Clock
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'Watch'"):
        load("Watch")


def test_packages_do_not_import_pyspark():
    code = f"import {', '.join(PACKAGES)}, sys; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_packages_with_lazy_exports_do_not_import_arrow():
    code = (
        "import penstock.catalog, penstock.engine, penstock.ingest, penstock.servers, sys; "
        "sys.exit('pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
