"""nginx as an S3 origin, with a delay to the first byte and a limit for each connection; see README.md in this folder."""
