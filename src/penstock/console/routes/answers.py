"""Route of sample answers: the prompts of [samples], and what the model said to them by step."""

from typing import Any

from fastapi import APIRouter, Request

from penstock.console.state import console_of, run_of

router = APIRouter(prefix="/api")


@router.get("/runs/{run_id}/answers")
def answers(request: Request, run_id: str) -> dict[str, Any]:
    """Return the prompts and their answers by step. Any: JSON."""
    prompts: dict[str, dict[str, Any]] = {}
    steps = []
    for record in console_of(request).columns(run_of(request, run_id)).answers():
        steps.append(record["step"])
        found = record.get("answers")
        for answer in found if isinstance(found, list) else []:
            if not isinstance(answer, dict):
                continue
            prompt = str(answer.get("prompt", ""))
            row = prompts.setdefault(prompt, {"prompt": prompt, "reference": None, "answers": []})
            row["reference"] = answer.get("reference") or row["reference"]
            row["answers"].append(
                {
                    "step": record["step"],
                    "answer": str(answer.get("answer", "")),
                    "cut": answer.get("finish") == "length",
                }
            )
    return {"steps": steps, "prompts": [*prompts.values()]}
