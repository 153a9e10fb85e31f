"""The rehearsal cloud: a local EC2, S3, SSM, IAM and IMDS whose instances are real processes, for nothing."""
