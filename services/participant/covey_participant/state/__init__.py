"""What the device keeps in its folder: identity, settings, cached blobs."""
