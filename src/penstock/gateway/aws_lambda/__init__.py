"""Unchanged handlers of S3 Object Lambda, run by the gateway."""

from penstock.gateway.aws_lambda.endpoint import InternalEndpoint
from penstock.gateway.aws_lambda.transform import LambdaTransform
from penstock.gateway.aws_lambda.write_response import PATH, WriteGetObjectResponse

__all__ = ["PATH", "InternalEndpoint", "LambdaTransform", "WriteGetObjectResponse"]
