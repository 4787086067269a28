variable "name" {
  type    = string
  default = "warmroute"
}

variable "aws_region" {
  type    = string
  default = "us-east-1"
}

variable "gcp_project" {
  type = string
}

variable "gcp_region" {
  type    = string
  default = "us-east4"
}

variable "gcp_gpu_zone" {
  type    = string
  default = "us-east4-a"
}
