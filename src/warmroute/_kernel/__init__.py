"""The compiled part. Each module here has a plain Python equal in the tests that property tests hold it to."""
