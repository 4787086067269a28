variable "name" {
  type        = string
  description = "Name of the cluster."
}

variable "cidr" {
  type        = string
  default     = "10.10.0.0/16"
  description = "Addresses of the VPC, also of the Pods."
}

variable "kubernetes_version" {
  type    = string
  default = "1.32"
}

variable "router_instance_type" {
  type    = string
  default = "c7i.xlarge"
}

variable "gpu_instance_type" {
  type    = string
  default = "g6.xlarge"
}

variable "gpu" {
  type        = string
  default     = "L4"
  description = "GPU of gpu_instance_type, as the autoscaler names it."
}

variable "gpu_nodes" {
  type    = object({ min = number, max = number })
  default = { min = 1, max = 4 }
}

variable "peer" {
  type        = object({ address = string, cidrs = list(string) })
  default     = null
  description = "The VPN gateway of another cloud, and the addresses behind it."
}
