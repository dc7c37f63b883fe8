"""Page of items in Chromium."""

from pathlib import Path

import pytest

from hlat.report import __main__ as report
from tests.unit.report.item_files import ATTACK, build_choice_item, write_model
from tests.unit.report.test_browser import CHROMIUM, Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,  # starts Chromium
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)"),
]
NUM_ITEMS = 10_000
SKILLS = {"a": 0.2, "b": 0.7}
ROWS = "[...document.querySelectorAll('#item-table tbody tr')].map((row) => row.innerText)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models = [
        write_model(root / name, NUM_ITEMS, skill, seed)
        for seed, (name, skill) in enumerate(SKILLS.items())
    ]
    assert report.main(["samples", *map(str, models)]) == 0
    return root / "items.html"


@pytest.fixture
def tab(browser: Tab, page: Path) -> Tab:
    browser.open(page)
    browser.wait("document.querySelectorAll('#item-table tbody tr').length > 0")
    return browser


def choose(tab: Tab, control: str, value: str, event: str = "change") -> None:
    element = f"document.getElementById('item-{control}')"
    tab.evaluate(f"{element}.value = {value!r}; {element}.dispatchEvent(new Event({event!r}))")


def read_status(tab: Tab) -> str:
    return str(tab.evaluate("document.getElementById('item-status').textContent"))


def count_items(wrong: str, right: str) -> int:
    """Return the number of items that one model answers wrongly and another one correctly."""
    seeds = {name: seed for seed, name in enumerate(SKILLS)}
    return sum(
        build_choice_item(i, SKILLS[wrong], seeds[wrong])["acc"]
        < build_choice_item(i, SKILLS[right], seeds[right])["acc"]
        for i in range(NUM_ITEMS)
    )


def test_wrong_and_changed_items_can_be_selected(tab: Tab) -> None:
    assert read_status(tab) == "10,000 of 10,000 items, 1 to 50 shown"
    choose(tab, "show", "wrong-0")
    rows = tab.evaluate(ROWS)
    assert len(rows) == 50
    assert all(row.split("\t")[3].startswith("✗") for row in rows)
    choose(tab, "show", "gained-1")
    assert read_status(tab).startswith(f"{count_items('a', 'b'):,} of 10,000 items")
    assert all(row.split("\t")[3][0] + row.split("\t")[4][0] == "✗✓" for row in tab.evaluate(ROWS))
    choose(tab, "metric", "acc_norm")
    assert not read_status(tab).startswith(f"{count_items('a', 'b'):,} of")


def test_items_can_be_searched_paged_and_opened(tab: Tab) -> None:
    tab.evaluate("[...document.querySelectorAll('.item-pager button')][1].click()")
    assert read_status(tab).endswith("51 to 100 shown")
    choose(tab, "search", "question 9977:", "input")
    assert read_status(tab) == "1 of 10,000 items, 1 to 1 shown"
    tab.evaluate("document.querySelector('#item-table tbody button').click()")
    details = tab.evaluate("document.querySelector('.item-details').innerText")
    item = build_choice_item(9977, SKILLS["b"], 1)
    assert item["arguments"]["gen_args_0"]["arg_0"] in details
    assert "(target)" in details
    assert f"{float(item['filtered_resps'][0][0]):.4f}" in details
    tab.evaluate("document.querySelector('#item-table tbody button').click()")
    assert tab.evaluate("document.querySelectorAll('.item-details').length") == 0


def test_generated_answers_and_filters(tab: Tab) -> None:
    tab.evaluate(
        "[...document.querySelectorAll('button.task')].find((b) => b.innerText === 'sums').click()"
    )
    tab.wait("document.getElementById('item-status').textContent.includes('of 4 items')")
    assert "[invalid]" in tab.evaluate(ROWS)[0]
    choose(tab, "filter", "flexible")
    choose(tab, "show", "lost-1")
    assert [row.split("\t")[0] for row in tab.evaluate(ROWS)] == ["1", "3"]
    tab.evaluate("document.querySelector('#item-table tbody button').click()")
    assert "#### 7" in tab.evaluate("document.querySelector('.item-details').innerText")


def test_markup_in_items_is_text(tab: Tab) -> None:
    tab.evaluate("document.querySelector('#item-table tbody button').click()")
    assert ATTACK in tab.evaluate("document.querySelector('.item-details pre').innerText")
    assert tab.evaluate("document.title") == "a and b - items"
