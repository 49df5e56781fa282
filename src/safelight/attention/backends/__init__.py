"""One attention backend a file, each with its declaration BACKEND."""
