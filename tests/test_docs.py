from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture
def directives(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pytest.importorskip("docutils")
    return importlib.import_module("site_directives")


def test_error_index_contains_raised_texts(directives: Any) -> None:
    found = list(directives.raised())
    assert len(found) > 300
    texts = {place.text for place in found if place.module == "sb3_ext.gym_vec_env"}
    assert any("is not a vectorized environment: it has no num_envs. Use" in text for text in texts)


def test_error_index_lists_modules_of_buffers_together(directives: Any) -> None:
    modules = {place.module for place in directives.raised()}
    of_buffers = {name for name in modules if re.search(r"buffers?$|prioritized|storage|\.frames|\.datasets", name)}
    assert len(of_buffers) > 20
    assert {directives.component_of(name) for name in of_buffers} == {"Buffers"}


def test_readme_is_short_and_its_relative_links_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1200
    links = re.findall(r"\]\((?!https://)([^)#]+)", text)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_commands_and_files_named_on_pages_exist() -> None:
    for page in [*PAGES, ROOT / "README.md"]:
        text = page.read_text()
        for name in re.findall(r"benchmarks\.(?!md|html)([a-z_]+)", text):
            assert (ROOT / "benchmarks" / f"{name}.py").exists(), (page, name)
        for name in re.findall(r"`(?:scripts|tests|examples)/([\w/.]+\.\w+)`", text):
            paths = [ROOT / top / name for top in ("scripts", "tests", "examples")]
            assert any(path.exists() for path in paths), (page, name)


def test_files_named_by_the_contributing_page_exist() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text()
    for path in re.findall(r"`((?:rl_ext_core|sb3_ext|torchrl_ext)/[\w/.]*)`", text):
        assert (ROOT / path).exists() or (ROOT / "shared" / path).exists(), path
    assert text.count("<details>") == 20


_RESUME_SCRIPT = """
import os
import gymnasium

class Killed(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        Killed.steps += 1
        if Killed.steps == {killed_at}:
            os._exit(9)
        return super().step(action)

env = Killed(gymnasium.make("CartPole-v1"))
{lines}
print(model.num_timesteps, Killed.steps, model.replay_buffer.size(), round(model.exploration_rate, 3))
"""


@pytest.mark.slow
def test_resume_guide_example_continues_at_the_checkpoint(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "resume.md").read_text()
    lines = re.search(r"## Buffers in files.*?```python\n(.*?)```", page, re.DOTALL)[1]
    for written, short in (
        ("env = make_my_env()\n", ""),
        ("10_000_000", "800"),
        ("100_000", "200"),
        ('"CnnPolicy", env', '"MlpPolicy", env, buffer_size=2000, learning_starts=50, exploration_fraction=0.5'),
    ):
        assert lines.count(written) == 1
        lines = lines.replace(written, short)

    def run(killed_at: int) -> subprocess.CompletedProcess[str]:
        code = _RESUME_SCRIPT.format(killed_at=killed_at, lines=lines)
        environ = {**os.environ, "TMPDIR": str(tmp_path)}  # for SB3's logs
        return programs.run(code, "sb3", cwd=tmp_path, environ=environ)

    assert run(killed_at=111).returncode == 9  # before the first checkpoint
    assert run(killed_at=350).returncode == 9
    done = run(killed_at=0)
    assert done.returncode == 0, done.stderr
    steps, steps_here, size, epsilon = done.stdout.splitlines()[-1].split()
    assert (steps, steps_here, epsilon) == ("800", "600", "0.05")
    added = 110 + 349 + 600
    assert added - 2 <= int(size) <= added  # a crash costs the last transition at most


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason='the site needs pip install "./rl-ext[docs]"')
    ignored = shutil.ignore_patterns("_build", "notebooks")
    # The build copies the notebooks next to the pages.
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=ignored)
    for name in ("shared", "sb3_ext", "torchrl_ext", "examples", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = ["-d", str(tmp_path / "trees"), str(tmp_path / "docs"), str(tmp_path / "html")]
    done = subprocess.run([*command, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    index = re.sub("<[^>]+>", "", (tmp_path / "html" / "errors.html").read_text())
    assert "is not a vectorized environment: it has no num_envs" in index
    script = (tmp_path / "html" / "searchindex.js").read_text()
    search_index = json.loads(script[len("Search.setIndex(") : -1])
    for question, guide in QUESTIONS.items():
        found = search(search_index, question)
        assert found[0] == guide, (question, found)


# As users type them, and the page that answers.
QUESTIONS = {
    "my DQN runs out of memory": "guides/buffers",
    "my env crashes with two instances": "guides/single_instance",
    "robosuite uses the wrong GPU": "guides/rendering_gpu",
    "ParallelEnv cannot pickle": "guides/torchrl_parallel",
    "Isaac Lab into SB3": "guides/vectorized_gpu",
    "why is my vec env slow": "guides/sb3_parallel",
    "how do I resume a run": "guides/resume",
    "start from a Minari dataset": "guides/datasets",
    "prioritized experience replay for DQN": "guides/buffers",
    "SliceSampler is slow": "troubleshooting",
    # Titles of issues of SB3, baselines, MuJoCo and TorchRL.
    "replay buffer won't fit into memory": "guides/buffers",
    "optimization of memory usage": "guides/buffers",
    "MUJOCO_EGL_DEVICE_ID has no effect": "guides/rendering_gpu",
    "MUJOCO_EGL_DEVICE_ID must be between 0 and 0": "guides/rendering_gpu",
    "SubprocVecEnv slower than DummyVecEnv": "guides/sb3_parallel",
    "multiple environments per process": "guides/sb3_parallel",
    "ParallelEnv MeltingPot": "guides/torchrl_parallel",
    "resuming training of loaded model": "guides/resume",
    "VecEnv for gymnasium VectorEnv and Brax": "guides/vectorized_gpu",
    "Isaac Gym with Stable Baselines3": "guides/vectorized_gpu",
    # Of a newcomer who found nothing, or another page.
    "cap the memory": "guides/buffers",
    "curve differs after resume": "guides/resume",
    "multi gpu ddp": "guides/scale",
    "rl zoo": "recipes",
    "maskable ppo": "recipes",
    "optuna": "recipes",
    "wandb": "recipes",
    "jupyter interrupt": "recipes",
    "hydra submitit": "recipes",
    "imitation": "recipes",
    "cleanrl": "recipes",
    "docker": "recipes",
    "recurrent lstm": "recipes",
    "ToTensorImage": "guides/frame_storage",
    "float32 images": "guides/frame_storage",
    "ray cluster": "guides/ray",
    "egl wrong gpu": "guides/rendering_gpu",
    "fmu": "guides/single_instance",
    "brax": "guides/vectorized_gpu",
}


def search(index: dict[str, Any], question: str) -> list[str]:
    """Return the pages that the site's search finds, best first: as Sphinx's searchtools.js with _static/scorer.js."""
    from sphinx.search.en import SearchEnglish  # here, because "make test" does not install Sphinx

    language = SearchEnglish({})
    scores: list[dict[str, int]] = [{} for _ in index["docnames"]]
    words = {language.stem(word.lower()) for word in question.split() if word.lower() not in language.stopwords}
    for word in words:
        for terms, whole, partial in ((index["terms"], 5, 2), (index["titleterms"], 15, 7)):
            matches = {word: whole} if word in terms else {term: partial for term in terms if word in term}
            for term, score in matches.items():
                pages = terms[term] if isinstance(terms[term], list) else [terms[term]]
                for page in pages:
                    scores[page][word] = score
    required = {word for word in words if len(word) > 2}
    found = [page for page, matched in enumerate(scores) if required <= set(matched)]
    names = {index["docnames"][page]: max(scores[page].values()) for page in found}
    for name in names:
        names[name] += 8 if name.startswith(("guides/", "recipes")) else 4 if name == "troubleshooting" else 0
    return sorted(names, key=lambda name: -names[name])
