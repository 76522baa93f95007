"""infinilm.server: inference_server serves a model over HTTP, as a class and as a program."""
