"""Worker processes: which rows each fills, the messages between them and the training process, and the death of a worker."""
