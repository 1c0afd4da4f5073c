"""The HTTP server: requests in, tokens out. One thread owns the device, one event loop owns the sockets."""
