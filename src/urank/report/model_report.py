"""The view of a ranking model in a notebook."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from urank.report.evaluation_report import POLICIES, policy_section
from urank.report.page import Section, Summary, notebook_html
from urank.report.tables import Table, as_sentence

if TYPE_CHECKING:
    from urank.evaluation.policy_evaluation import Evaluation
    from urank.ranking.ranking_model import RankingModel


def model_html(model: RankingModel, why: str = "", choice: Evaluation | None = None) -> str:
    """Return the view in a notebook.

    Args:
        why: the reason for its method, as in `ModelFit.why`.
        choice: the evaluation on the validation split by which the method was chosen.
    """
    features = model.clicks.featurizer
    rows = {
        "components": model.name,
        "earns": model.goal,
        "positions": str(model.clicks.positions),
        "features": f"{len(features.numeric)} numeric, {len(features.categorical)} categorical",
        "can rank by": ", ".join(model.methods),
        "columns": ", ".join(f"{role}={column}" for role, column in model.columns.items()) or "as urank names them",
    }
    sections = [Section("The model", tables=[Table(("model", ""), list(rows.items()), words=("",))])]
    if choice is not None:
        sections.append(replace(policy_section(choice), title="On the validation split"))
    answer = f"This model ranks by {model.method}: {POLICIES[model.method]}."
    following = "`urank.evaluate(model, log)` estimates what it would earn, and `model.rank(candidates)` ranks."
    return notebook_html(Summary(answer, as_sentence(why) if why else "", following), sections)
