"""Images and manifests, and the program that checks the images."""
