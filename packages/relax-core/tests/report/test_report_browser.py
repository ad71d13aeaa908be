"""The report in a real browser, without a network."""

import io
import json
import os
import shutil

import numpy
import pytest
from PIL import Image
from relax_core.cli.report import draw

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        if os.environ.get("RELAX_REQUIRE_BROWSER"):
            pytest.fail("RELAX_REQUIRE_BROWSER is set, but there is no chromium on the PATH")
        pytest.skip("no chromium on the PATH; RELAX_REQUIRE_BROWSER=1 makes this an error")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a report from disk; anything that goes wrong in the page, or leaves it, fails the test."""
    contexts, faults = [], []

    def open_page(file, **options):
        context = browser.new_context(offline=True, viewport={"width": 1300, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on(
            "request", lambda request: faults.append(request.url) if request.url != file.as_uri() else None
        )
        page.goto(file.as_uri())
        page.wait_for_selector("#samples")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def chart(page, title):
    return page.locator(f'[data-chart="{title}"]')


def points(page, title):
    """[x, y] of every point of every curve of a chart, in pixels."""
    paths = chart(page, title).locator("path.curve").evaluate_all("all => all.map(p => p.getAttribute('d'))")
    return [
        [tuple(map(float, part.split())) for part in path.replace("M", "L").split("L") if part]
        for path in paths
    ]


def test_every_chart_that_has_data_is_drawn(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    titles = page.locator("figure.chart").evaluate_all("all => all.map(f => f.dataset.chart)")
    assert titles == [
        "accuracy",
        "reward",
        "loss",
        "entropy",
        "log-prob gap",
        "response length",
        "MTP loss",
        "MTP acceptance",
        "gradient norm",
        "learning rate",
        "time by phase",
    ]
    (reward,) = points(page, "reward")
    assert len(reward) == 20
    assert [x for x, _ in reward] == sorted(x for x, _ in reward)
    assert [y for _, y in reward] == sorted((y for _, y in reward), reverse=True), "a rising reward goes up"
    (entropy,) = points(page, "entropy")
    assert len(entropy) == 19, "NaN is a gap"
    assert page.get_by_text("0.25 → 0.75").is_visible()
    assert page.get_by_text("2:05 min").is_visible()


def test_the_picture_is_not_empty(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    for title in ("reward", "time by phase"):
        picture = Image.open(io.BytesIO(chart(page, title).locator("svg.plot").screenshot()))
        pixels = numpy.asarray(picture.convert("RGB"), dtype=float)
        assert pixels.var() > 50
        assert len(numpy.unique(pixels.reshape(-1, 3), axis=0)) > 20


def test_phases_are_stacked_to_the_length_of_the_step(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    areas = chart(page, "time by phase").locator("path.area")
    names = areas.evaluate_all("all => all.map(p => p.dataset.label)")
    assert names == ["rollout", "reward", "train", "eval", "other"]
    legend = chart(page, "time by phase").locator(".legend").inner_text()
    assert "train 50 %" in legend, "60 of 121 seconds"
    assert "rollout 33 %" in legend
    assert "other 8 %" in legend


def rows(page):
    return page.locator("#samples tbody tr").count()


def test_the_filter_filters(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    count = page.locator("#sample-count")
    assert count.inner_text() == "40 of 40 completions"
    assert rows(page) == 40

    page.get_by_label("Text").fill("MAYBE 1")
    assert count.inner_text() == "5 of 40 completions", "maybe 11, 13, 15, 17 and 19"
    marks = page.locator("#samples mark").evaluate_all("all => all.map(m => m.textContent)")
    assert set(marks) == {"maybe 1"}

    page.locator("input[name=stepFrom]").fill("6")
    assert rows(page) == 4
    page.locator("input[name=stepTo]").fill("7")
    assert page.locator("#samples td.completion").all_inner_texts() == ["maybe 13", "maybe 15"]

    page.locator("input[name=rewardFrom]").fill("0.5")
    assert count.inner_text() == "0 of 40 completions"
    assert page.get_by_text("No completion fits.").is_visible()

    page.get_by_role("button", name="Clear").click()
    page.locator("input[name=rewardTo]").fill("0.5")
    # Not wait_for_function: when it has to wait, it evaluates a string, which the page's policy forbids.
    from playwright.sync_api import expect

    expect(count).to_contain_text("20 of 40")


def test_the_table_sorts_and_unfolds(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    head = page.locator("#samples th", has_text="Step")
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert page.locator("#samples tbody tr").first.locator("td").first.inner_text() == "20"
    page.locator("#samples th", has_text="Advantage").get_by_role("button").click()
    assert page.locator("#samples tbody tr").first.locator("td").last.inner_text() == "-0.5"

    page.get_by_label("Text").fill("long thought")
    fold = page.locator("#samples td.completion .fold")
    folded = fold.bounding_box()["height"]
    page.get_by_role("button", name="more", exact=True).click()
    assert fold.bounding_box()["height"] > 4 * folded


def test_hostile_completions_are_inert(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    page.get_by_label("Text").fill("hacked")
    assert "</script ><script>window.hacked" in page.locator("#samples td.completion").inner_text()
    assert page.locator("#samples td b, #samples img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_two_runs_overlay_with_a_legend(make_run, open_page):
    page = open_page(draw([make_run("first"), make_run("second", shift=0.1, seed=7)]))
    first, second = points(page, "reward")
    assert all(upper < lower for (_, lower), (_, upper) in zip(first, second, strict=True)), "0.1 higher"
    assert chart(page, "reward").locator(".legend").inner_text().split("\n") == ["first", "second"]
    colors = (
        chart(page, "reward")
        .locator("path.curve")
        .evaluate_all("all => all.map(p => getComputedStyle(p).stroke)")
    )
    assert len(set(colors)) == 2
    settings = page.locator("details.settings")
    assert settings.locator("tbody tr").count() == 1, "only the seed differs"
    assert settings.locator("tbody tr").inner_text().split("\t") == ["run.seed", "0", "7"]

    page.get_by_label("Run").select_option("second")
    assert page.locator("#sample-count").inner_text() == "40 of 80 completions"
    assert set(page.locator("#samples td.run").all_inner_texts()) == {"second"}


def test_last_values_of_two_runs_stand_side_by_side(make_run, open_page):
    page = open_page(draw([make_run("first"), make_run("second", shift=0.1, steps=10)]))
    table = page.locator("details.values")
    lines = [line.split("\t") for line in table.locator("tbody tr").all_inner_texts()]
    values = {line[0].split()[0]: line[1:] for line in lines}
    assert values["reward"] == ["1", "0.6"], "20 / 20 and 10 / 20 + 0.1"
    assert values["eval_accuracy"] == ["0.25 (step 0)", "0.25 (step 0)"]
    assert values["entropy"] == ["1", "NaN"]
    assert table.locator("thead th").all_inner_texts() == [" first", " second"]
    alone = open_page(draw([make_run("third")]))
    assert alone.locator("details.values").get_attribute("open") is None


def test_drafts_are_compared_by_depth(make_run, open_page):
    page = open_page(draw([make_run("first", deep=True), make_run("second")]))
    lines = [line.split("\t") for line in page.locator("#draft tbody tr").all_inner_texts()]
    assert lines[:2] == [["depth 0", "75.0 %", "\u2013"], ["depth 1", "50.0 %", "\u2013"]]
    assert lines[2][1:] == ["2.13", "\u2013"], "1 + 3/4 + 3/4 x 1/2 = 2.125"
    assert chart(page, "MTP acceptance").locator("path.curve").count() == 4, "all and two depths, and all"
    assert open_page(draw([make_run("third")])).locator("#draft").count() == 0


def test_alerts_are_listed_with_what_to_do(make_run, open_page):
    first, second = make_run("first"), make_run("second")
    hostile = {"step": 7, "name": "not_finite", "message": "<b>loss</b> is not finite", "advice": "Lower it"}
    (second / "alerts.jsonl").write_text(json.dumps(hostile) + "\n")
    page = open_page(draw([first, second]))
    assert page.get_by_role("heading", name="Alerts (1)").is_visible()
    assert page.locator(".alerts li").all_inner_texts() == [
        "second, step 7: <b>loss</b> is not finite. Lower it."
    ]
    assert open_page(draw([first])).locator(".alerts").count() == 0


def test_values_are_read_with_the_keyboard(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    plot = chart(page, "reward").locator(".plot-box")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    tip = plot.locator(".tip")
    assert tip.is_visible()
    assert tip.inner_text().split() == ["step", "2", "reward", "0.1"]
    assert chart(page, "reward").locator("[aria-live]").inner_text() == "step 2: reward 0.1"
    line = chart(page, "loss").locator("line.cursor")
    assert line.get_attribute("visibility") == "visible", "all charts share the cursor"
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_smoothing_redraws_the_curves(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    (before,) = points(page, "reward")
    page.locator("input[name=smoothing]").fill("0.8")
    faint, after = points(page, "reward")
    assert len(faint) == len(after) == len(before)
    assert after != faint
    (_, flat) = points(page, "MTP loss")
    assert len(flat) == 20, "a value that never changes keeps a scale, for all its rounding"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(make_run, open_page, scheme):
    page = open_page(draw([make_run("first")]), color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(246, 247, 249)", "rgb(18, 21, 28)"
    own, other = (light, dark) if scheme == "light" else (dark, light)
    assert page.evaluate(background) == own
    page.locator("button.theme").click()
    assert page.evaluate(background) == other


def test_a_run_of_one_step_without_samples_is_drawn(make_run, open_page):
    folder = make_run("first", steps=1)
    (folder / "samples.jsonl").unlink()
    (folder / "summary.json").unlink()
    page = open_page(draw([folder]))
    assert chart(page, "reward").locator("circle").count() == 1
    assert page.get_by_text("No completions were recorded.").is_visible()


def test_a_run_of_an_older_version_beside_a_longer_new_one_is_drawn(make_run, open_page):
    """No times, alerts or config; samples without what newer ones have; metrics of a name unknown by now."""
    old, new = make_run("old"), make_run("new", steps=60)
    for name in ("config.yaml", "summary.json"):
        (old / name).unlink()
    lines = [json.dumps({"step": step, "reward": 0.5, "gone": step}) for step in range(1, 6)]
    (old / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 6, "rew')
    (old / "samples.jsonl").write_text('{"step": 1, "completion": "so"}\n{"step": 2, "prompt": "and?"}\n{}\n')
    (old / "alerts.jsonl").write_text('{"step": 3, "name": "of old"}\n')
    page = open_page(draw([old, new]))
    assert sorted(map(len, points(page, "reward"))) == [5, 60]
    (gone,) = points(page, "other")
    assert len(gone) == 5
    assert page.locator("#samples").get_by_text("so", exact=True).is_visible()
    assert page.get_by_text("of old").is_visible()
    assert page.get_by_text("undefined").count() == 0


def test_values_of_other_kinds_than_they_should_be_do_not_stop_the_page(make_run, open_page):
    folder = make_run("odd")
    odd = [
        {"step": 1, "reward": 0.25, "time": 5, "loss": "high"},
        {"step": 2, "reward": None, "time": None, "loss": {"a": 1}},
        {"step": 3, "reward": 0.75, "time": {"phases": {"train": "long"}, "total": None}, "loss": [1]},
        {"step": 3, "reward": 0.5, "time": {"total": 2.0}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    strange = {"step": "x", "prompt": {"role": "user"}, "completion": 7, "reward": "NaN", "advantage": []}
    (folder / "samples.jsonl").write_text(json.dumps(strange) + "\n")
    (folder / "alerts.jsonl").write_text('{"step": null, "name": 3, "message": [], "advice": {}}\n')
    (folder / "summary.json").write_text('{"steps": "many", "wall_s": null, "eval_before": []}')
    page = open_page(draw([folder]))
    (reward,) = points(page, "reward")
    assert len(reward) == 3, "null is a gap"


def test_a_narrow_window_has_no_sideways_scrolling(make_run, open_page):
    page = open_page(draw([make_run("first")]))
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
