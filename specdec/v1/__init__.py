"""The contract: stubs of protos/specdec/v1, made by `make protos`."""
