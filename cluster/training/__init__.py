"""Several workers that train one drafter together: `train` has Ray Train start them, each is a `train_worker`."""
