"""``zerosim figures`` on the command line."""

from typer.testing import CliRunner

from zerosim.cli import app
from zerosim.course.figures.ring import ring, ring_data
from zerosim.display.drawing import DARK


def test_the_command_line_draws_by_name_and_refuses_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["figures", "ring", "--out", str(tmp_path), "--dark"])
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'ring-dark.svg'}\n")
    assert (tmp_path / "ring-dark.svg").read_text(encoding="utf-8") == ring(ring_data(), DARK).svg()
    refused = CliRunner().invoke(app, ["figures", "memry", "--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("zerosim figures: no figure is called 'memry'")
