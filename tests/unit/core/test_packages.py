import pytest

from penstock.core.errors import PackageMissing
from penstock.core.packages import Package


def test_a_package_that_is_not_installed_is_named_when_it_is_used():
    absent = Package("penstock_absent.parts", "Fine days")
    with pytest.raises(PackageMissing, match=r"^Fine days need the package penstock_absent, .*pip install"):
        absent.anything()


def test_a_package_that_lacks_a_module_of_its_own_is_broken_not_missing(tmp_path, monkeypatch):
    (tmp_path / "penstock_broken.py").write_text("import penstock_absent")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="penstock_absent"):
        Package("penstock_broken", "Fine days").anything()


def test_a_submodule_is_imported_by_itself():
    assert Package("xml.sax.saxutils", "Marks").escape("<") == "&lt;"
