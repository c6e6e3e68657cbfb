"""Unchanged handlers of S3 Object Lambda, run by the gateway."""

from penstock.gateway.aws_lambda.bucket import LambdaBucket
from penstock.gateway.aws_lambda.endpoint import InternalEndpoint
from penstock.gateway.aws_lambda.sam import lambda_config_of
from penstock.gateway.aws_lambda.transform import LambdaTransform
from penstock.gateway.aws_lambda.write_response import PATH, WriteGetObjectResponse

__all__ = ["PATH", "InternalEndpoint", "LambdaBucket", "LambdaTransform", "WriteGetObjectResponse", "lambda_config_of"]
