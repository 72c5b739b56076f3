from moesaic.engine.stages import StageClock


def test_stages_have_their_seconds_in_order_and_add_up(caplog) -> None:
    now = [0.0]
    stages = StageClock(lambda: now[0])
    with caplog.at_level("INFO"):
        for stage, moment in (("load", 3.0), ("compile", 4.5), ("load", 5.0)):
            now[0] = moment
            stages.lap(stage)
    assert stages.seconds == {"load": 3.5, "compile": 1.5}
    assert "start-up: stage=compile seconds=1.50" in caplog.text
