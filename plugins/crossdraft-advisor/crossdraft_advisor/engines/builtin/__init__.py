"""Built-in engines and servers, one file each."""
