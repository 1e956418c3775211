"""The picture of the dashboard in docs/observability.md."""

from pathlib import Path

from dashboard import DASHBOARD, SHOWN

from tests.deploy.test_monitoring import dashboard_of


def test_what_is_drawn_is_on_the_dashboard(root: Path) -> None:
    assert DASHBOARD.is_file()
    titles = [panel["title"] for panel in dashboard_of(root)["panels"]]
    assert set(SHOWN) <= set(titles)
    assert len(set(SHOWN)) == len(SHOWN)


def test_the_picture_shows_those_panels(root: Path) -> None:
    """It was drawn after the last change of either."""
    drawn = (root / "docs/img/metrics.svg").read_text()
    assert [title for title in SHOWN if f">{title}</text>" not in drawn] == []
