"""Which models are served."""

from balanceroute.proxy.live.frontend.model_choice import AnyModel, ListedModels


def test_any_model_is_left_to_the_engines() -> None:
    assert AnyModel().refuse("whatever") is None
    assert AnyModel().refuse("") is None


def test_a_listed_model_is_served_and_no_other() -> None:
    models = ListedModels(["tiny", "lora-a"])
    assert models.refuse("tiny") is None
    assert models.refuse("lora-a") is None
    assert models.refuse("Tiny") == (
        "The model `Tiny` does not exist. Valid aliases: tiny, lora-a."
    )


def test_a_request_that_names_no_model_is_left_to_the_engine() -> None:
    assert ListedModels(["tiny"]).refuse("") is None


def test_a_long_name_is_not_repeated_whole() -> None:
    refusal = ListedModels(["tiny"]).refuse("x" * 10_000)
    assert refusal is not None
    assert len(refusal) < 300
