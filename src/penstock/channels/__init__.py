"""SageMaker's input channels on any host: files, pipes and mounts for any program."""
