variable "name" {
  type        = string
  description = "Name of the cluster."
}

variable "region" {
  type = string
}

variable "gpu_zone" {
  type        = string
  description = "A zone of the region that has the GPU."
}

variable "cidrs" {
  type    = object({ nodes = string, pods = string, services = string })
  default = { nodes = "10.20.0.0/20", pods = "10.21.0.0/16", services = "10.22.0.0/20" }
}

variable "router_machine_type" {
  type    = string
  default = "c3-standard-4"
}

variable "gpu_machine_type" {
  type    = string
  default = "g2-standard-8"
}

variable "accelerator" {
  type    = string
  default = "nvidia-l4"
}

variable "gpu" {
  type        = string
  default     = "L4"
  description = "GPU of the accelerator, as the autoscaler names it."
}

variable "gpu_nodes" {
  type    = object({ min = number, max = number })
  default = { min = 1, max = 4 }
}

variable "peered" {
  type        = bool
  default     = false
  description = "Whether there is a VPN to another cloud."
}

variable "peer" {
  type        = object({ address = string, secret = string })
  default     = null
  sensitive   = true
  description = "The VPN tunnel of the other cloud."
}

variable "peer_cidrs" {
  type        = list(string)
  default     = []
  description = "Addresses behind the VPN."
}
