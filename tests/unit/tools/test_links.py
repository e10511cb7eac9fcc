import pytest
from tools.links import ROOT, anchors, broken, tracked


def written(folder, **texts):
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_md", ".md").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return broken(folder, sorted(path for path in folder.rglob("*") if path.is_file()))


def test_all_links_of_this_checkout_lead_somewhere():
    assert broken(ROOT, tracked(ROOT)) == []


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("[b](b.md)", None),
        ("[b](b.md#two-words)", None),
        ("[b](#here)", None),
        ("[b\nb](c/d.md)", "a.md:3: c/d.md: there is no such file"),
        ("![b](b.svg)", "a.md:3: b.svg: there is no such file"),
        ("[b](b.md#three)", "a.md:3: b.md#three: b.md has no heading of that anchor"),
        ("[b](#there)", "a.md:3: #there: a.md has no heading of that anchor"),
        ("`[b](c.md)` and [d](https://example.com/c.md)", None),
        ("```\n[b](c.md)\n```", None),
    ],
)
def test_a_link_leads_to_a_file_and_a_heading(link, said, tmp_path):
    found = written(tmp_path, a_md=f"# Here\n\n{link}\n", b_md="# B\n\n## Two words\n")
    assert found == ([said] if said else [])


def test_a_page_of_the_manual_links_to_the_manual_only(tmp_path):
    found = written(tmp_path, a_md="# A\n", **{"docs/b_md": "[a](../a.md) [c](c.md)\n", "docs/c_md": "# C\n"})
    said = "b.md:1: ../a.md: it is not in the site: write its path as code, without a link"
    assert [line.removeprefix("docs/") for line in found] == [said]


def test_sources_name_pages_that_exist(tmp_path):
    folder = "docs"  # not spelt out, because this file is checked too
    text = f'"""See {folder}/b.md, {folder}/c.md, {folder}/adr/0001 and {folder}/adr/0002."""\n'
    found = written(tmp_path, a_py=text, docs__b_md="# B\n", **{"docs__adr__0001-x_md": "# 1\n"})
    assert found == [
        f"a.py:1: {folder}/adr/0002: there is no such page",
        f"a.py:1: {folder}/c.md: there is no such page",
    ]


def test_a_heading_that_comes_again_is_numbered(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A\n## `x_y`, z!\n## A\n```\n# B\n```\n## A\n")
    assert anchors(page) == {"a", "a-1", "a-2", "x_y-z"}
