"""verl: a checkpoint engine that sends a trainer's weights to rollout workers over the transfer engine."""
