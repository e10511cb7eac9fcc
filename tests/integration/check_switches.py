"""Each switch of a family compiled by Inductor, forward and backward: `make soak PART=operators`."""

import pytest
from tests.integration.test_switches import IDS, SWITCHES, built, compiled, error, quick_inductor, switched

__all__ = ["quick_inductor"]


def gradients(model, compute):
    logits = compute(model)
    logits.square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), **found}


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.usefixtures("quick_inductor")
@pytest.mark.parametrize("name", SWITCHES)
def test_inductor_has_the_logits_and_gradients_of_the_plain_network_in_float64(name):
    with switched(SWITCHES[name]) as config:
        expected = gradients(built(config).double(), lambda model: model(IDS))
        found = gradients(built(config), lambda model: compiled(model, "inductor"))
    assert found.keys() == expected.keys()
    for part, theirs in expected.items():
        assert error(found[part], theirs) < 2e-5, part
