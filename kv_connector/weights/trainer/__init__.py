"""The parts of a trainer's side behind WeightPusher."""
